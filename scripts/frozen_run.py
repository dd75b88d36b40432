"""Record what the package does today, so that two source trees can be compared.

    python scripts/frozen_run.py inputs INPUTS
    PYTHONPATH=OLD/src python scripts/frozen_run.py record DIR_A --inputs INPUTS [--only a,b]
    PYTHONPATH=NEW/src python scripts/frozen_run.py record DIR_B --inputs INPUTS
    python scripts/frozen_run.py compare DIR_A DIR_B [--tolerance 1e-6] [--ignore-layout]

Only public doors are used: ``python -m elias``, ``from elias import ...``, HTTP and saved files.
Make the inputs once, with the old tree: the list of documented names is one of them. Without
``--inputs``, ``record`` makes its own. Paths, times and versions are left out of the records. The
sections are the functions below, in alphabetical order of their letters (see ``SECTIONS``).
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

import frozen_cases as cases
from frozen_compare import compare, digest, parsed, say, tensor_differences, without_times

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")},
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"},
    **{"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "PYTHONUTF8": "1", "FROZEN_RUN": "1"},
}
TIME = re.compile(r"\d[\d.,]* (h|min|s)\b( \d+ (min|s)\b)*")


class Recorder:
    """Runs commands in ``DIR/work`` and collects the values and tensors of one section."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}

    def fork(self, action: Callable[[], object], stdin: str = "") -> tuple[int, str, str]:
        """Run an action in a child process; return its exit code, stdout and stderr.

        The child inherits torch and the like, already imported, so it starts at once.
        """
        files = [self.work / name for name in ("stdin.tmp", "stdout.tmp", "stderr.tmp")]
        files[0].write_text(stdin, encoding="utf8")
        sys.stdout.flush()
        if not (child := os.fork()):
            for number, path in enumerate(files):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC * bool(number)), number)
            os.chdir(self.work)
            code: Any = 0
            try:
                action()
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out, err = (self.plain(path.read_text(encoding="utf8")) for path in files[1:])
        return code, out, err

    def elias(self, *args: object, stdin: str = "") -> tuple[int, str, str]:
        """Run ``python -m elias ARGS``."""

        def command() -> None:
            sys.argv = ["elias", *map(str, args)]
            runpy.run_module("elias", run_name="__main__", alter_sys=True)

        return self.fork(command, stdin)

    def keep(self, name: str, *args: object, stdin: str = "") -> None:
        """Run a command and record its exit code and stdout, and stderr if it failed."""
        code, out, err = self.elias(*args, stdin=stdin)
        self.values[name] = {"code": code, "out": parsed(out), **({"err": err} if code else {})}

    def python(self, name: str, code: str) -> None:
        """Run Python code and record the JSON it prints."""
        status, out, err = self.fork(lambda: exec(code, {"__name__": "__main__"}))
        self.values[name] = parsed(out) if status == 0 else {"code": status, "err": err}

    def plain(self, text: str) -> str:
        """Return a text without paths of this machine, times and spaces at the end of lines."""
        for tree in os.environ["PYTHONPATH"].split(os.pathsep):
            text = text.replace(tree, "TREE")
        text = re.sub(TIME, "N s", text.replace(str(self.work), "WORK"))
        return "\n".join(line.rstrip() for line in text.splitlines())

    def train(self, name: str, changes: dict[str, Any]) -> str:
        """Return the folder of a run, trained unless it is there already."""
        if not (self.work / "runs" / name).exists():
            code, out, err = self.elias(*train_command(name, changes))
            if code:
                raise SystemExit(f"training {name} ended with {code}:\n{out}\n{err}")
            (self.work / "runs" / f"{name}.out").write_text(out, encoding="utf8")
        return f"runs/{name}"

    def keep_run(self, name: str) -> None:
        """Record all files of a run: tensors, JSON, texts, and the layout by itself."""
        from numpy import load
        from safetensors.torch import load_file
        from torch import from_numpy

        root, layout = self.work / "runs" / name, []
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            file = path.relative_to(root).as_posix()
            layout.append(file)
            key, text = f"{name}|{file}", "" if path.suffix in (".safetensors", ".npy") else None
            if path.suffix == ".safetensors":
                self.tensors |= {f"{key}|{k}": tensor for k, tensor in load_file(path).items()}
            elif path.suffix == ".npy":
                self.tensors[f"{key}|{path.stem}"] = from_numpy(load(path))
            elif path.name not in ("train.log", ".lock"):
                text = self.plain(path.read_text(encoding="utf8"))
                recorded = without_times(parsed(text)) if path.suffix.startswith(".json") else text
                self.values[key] = recorded if len(text) < 20_000 else digest(json.dumps(recorded))
        self.values[f"layout|{name}"] = layout
        out = self.work / "runs" / f"{name}.out"
        self.values[f"{name}|stdout"] = out.read_text(encoding="utf8") if out.exists() else None


def train_command(name: str, changes: dict[str, Any]) -> list[str]:
    """Return the arguments of ``elias`` that train a run."""
    changed = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return ["train", "inputs/corpus", "--out", f"runs/{name}", "--device", "cpu", *changed]


def bag(recorder: Recorder) -> None:
    """Record an ensemble of two bag models with ranker, calibration, names and probabilities."""
    run, texts, cpu = bag_run(recorder), "inputs/texts.txt", ("--device", "cpu")
    recorder.keep_run("bag")
    for part in ("stage1", "stage2", "rerank", "calibrate", "names", "ensemble"):
        recorder.keep(f"predict {part}", "predict", run, texts, "--component", part, *cpu)
        recorder.keep(f"evaluate {part}", "evaluate", run, "inputs/corpus", "--json", *cpu,
                      "--component", part)  # fmt: skip
    choices = ("-k 8", "--threshold f1", "--threshold 0.3", "--threshold recall=0.5", "--only 3",
               "--only 3 --only 5 --without 5", "--without 11")  # fmt: skip
    for options in choices:
        recorder.keep(f"predict {options}", "predict", run, texts, *options.split(), *cpu)
    for suffix in ("txt", "csv", "tsv", "jsonl", "jsonl.gz", "parquet"):
        out = f"labels.{suffix}"
        recorder.keep(f"file {suffix}", "predict", run, texts, "--out", out, "-k", 3, *cpu)
        data = (recorder.work / out).read_bytes()
        recorder.values[f"bytes {suffix}"] = digest(gzip.decompress(data) if "gz" in out else data)
    recorder.keep("evaluate", "evaluate", run, "inputs/corpus", "--json", *cpu)
    recorder.keep("validation", "evaluate", run, "inputs/corpus", "--split", "validation", *cpu)
    recorder.keep("explain", "explain", run, "-", "--json", *cpu, stdin=some_text(recorder))
    recorder.keep("explain table", "explain", run, some_text(recorder), "--member", 1, *cpu)
    recorder.keep("info", "info", run)
    recorder.python("api", cases.API)
    recorder.python("estimator", cases.ESTIMATOR)


def bag_run(recorder: Recorder) -> str:
    """Return the run that several sections use."""
    return recorder.train("bag", cases.SMALL | {"ensemble.members": 2})


def some_text(recorder: Recorder) -> str:
    """Return a test text of the corpus."""
    return (recorder.work / "inputs/texts.txt").read_text(encoding="utf8").splitlines()[0]


def keep_model(recorder: Recorder, name: str) -> None:
    """Record the files, predictions, metrics and explanations of a run."""
    run, cpu = f"runs/{name}", ("--device", "cpu")
    recorder.keep_run(name)
    recorder.keep("predict", "predict", run, "inputs/texts.txt", *cpu)
    recorder.keep("evaluate", "evaluate", run, "inputs/corpus", "--json", *cpu)
    recorder.keep("explain", "explain", run, some_text(recorder), "--json", *cpu)


def one_vs_all(recorder: Recorder) -> None:
    """Record a model that scores every label."""
    recorder.train("all", cases.ALL)
    keep_model(recorder, "all")


def two_processes(recorder: Recorder) -> None:
    """Record a model that two processes train together."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [sys.executable, *launcher, str(cases.free_port()), "-m", "elias"]
    command += train_command("two", cases.SMALL)
    done = subprocess.run(
        command,
        cwd=recorder.work,
        capture_output=True,
        text=True,
    )
    recorder.values["train"] = {"code": done.returncode, "out": recorder.plain(done.stdout)}
    if done.returncode:
        raise SystemExit(done.stderr)
    keep_model(recorder, "two")


def transformer(recorder: Recorder) -> None:
    """Record a model with a tiny cases.BERT encoder."""
    recorder.train("bert", cases.BERT)
    keep_model(recorder, "bert")


def onnx(recorder: Recorder) -> None:
    """Record what exported models return, by onnxruntime alone and from texts."""
    for name, run, options in (
        ("graph", recorder.train("plain", cases.SMALL), ()),
        ("all", recorder.train("all", cases.ALL), ("--int8",)),
    ):
        recorder.keep(f"export {name}", "export", run, f"{name}.onnx", "-k", 10, *options)
        recorder.python(f"texts {name}", cases.ONNX_TEXTS.format(name))
        recorder.python(f"ids {name}", cases.ONNX_IDS.format(name))


def serve(recorder: Recorder) -> None:
    """Record the answers of the server."""
    port, text = cases.free_port(), some_text(recorder)
    limits = ["--max-inputs", "8", "--max-text", "500", "--max-body", "20000", "--device", "cpu"]
    command = [sys.executable, "-m", "elias", "serve", bag_run(recorder), *limits]
    with (recorder.work / "serve.log").open("w") as log:
        server = subprocess.Popen([*command, "--port", str(port)], cwd=recorder.work, stderr=log)
    try:
        for _ in range(600):
            time.sleep(0.1)
            with suppress(OSError):
                if cases.answer(f"http://127.0.0.1:{port}/ready", "GET", None)[0] == 200:
                    break
        for number, (method, path, body) in enumerate(cases.REQUESTS):
            asked = body if body is None or isinstance(body, bytes) else cases.put_text(body, text)
            status, kind, said = cases.answer(f"http://127.0.0.1:{port}{path}", method, asked)
            content = parsed(recorder.plain(said)) if "json" in kind else len(said) > 0
            key = f"{number:02} {method} {path} {str(body)[:60]}"
            recorder.values[key] = [status, kind, content]
    finally:
        server.send_signal(signal.SIGTERM)
        recorder.values["exit code"] = server.wait(60)


def command_line(recorder: Recorder) -> None:
    """Record help texts, and exit codes and messages of wrong invocations."""
    bag_run(recorder)
    for words in cases.COMMANDS:
        recorder.keep(f"help {words}", *words.split(), "--help")
    recorder.keep("version", "--version")
    for line in cases.WRONG:
        code, out, err = recorder.elias(*line.split())
        recorder.values[f"wrong {line}"] = [code, out, err]


def formats(recorder: Recorder) -> None:
    """Record what is read from each format, and from each format that is written."""
    for source in ("corpus", *(f for f in cases.FILES if "/" not in f), "by-row", "lf"):
        recorder.keep(f"info {source}", "data", "info", f"inputs/{source}", "--json")
    recorder.keep("table", "data", "info", "inputs/corpus")
    for source in ("corpus", "sparse.txt", "lf"):
        for target in ("jsonl", "csv", "tsv", "parquet", "csv.gz", "folder", "pecos", "lf", "xmc"):
            is_folder = target in ("folder", "pecos", "lf", "xmc")
            path = f"converted/{source}" + (f"-{target}" if is_folder else f".{target}")
            options = ("--format", target) if is_folder else ()
            name = f"{source} to {target}"
            recorder.keep(name, "data", "convert", f"inputs/{source}", path, *options)
            if (recorder.work / path).exists():
                recorder.keep(f"{name}, read back", "data", "info", path, "--json")
                recorder.python(f"{name}, fingerprint", cases.FINGERPRINT.format(path))


def report_and_experiment(recorder: Recorder) -> None:
    """Record the headings of the report, and the numbers of a small ablation."""
    recorder.keep("report", "report", bag_run(recorder), "--out", "report.html", "--device", "cpu")
    page = (recorder.work / "report.html").read_text(encoding="utf8")
    recorder.values["headings"] = re.findall(r"<h[1-4][^>]*>(.*?)</h[1-4]>", page)
    recorder.values["size without digits"] = len(re.sub(r"[\d.,]+", "", recorder.plain(page)))
    tiny = cases.SMALL | {"stages.stage2.epochs": 1, "rerank.char_ngrams": [0, 0]}
    changed = [word for key, value in tiny.items() for word in ("--set", f"{key}={value}")]
    folder = ("inputs/corpus", "--out", "ablation", "--device", "cpu", "--members", 1)
    recorder.keep("ablation", "experiment", "ablation", *folder, *changed, "--json")


def names_and_keys(recorder: Recorder) -> None:
    """Record presets, configuration keys, and which documented names can be imported."""
    recorder.keep("presets", "presets")
    recorder.keep("presets as JSON", "presets", "--json")
    recorder.keep("dry run", "train", "inputs/corpus", "--dry-run", "--json", "--device", "cpu")
    recorder.python("configuration", cases.KEYS.format("EliasConfig()"))
    for preset in recorder.values["presets as JSON"]["out"]:
        recorder.python(f"preset {preset}", cases.KEYS.format(f"EliasConfig.preset({preset!r})"))
    recorder.python("public", "import elias, json\nprint(json.dumps(sorted(elias.__all__)))")
    recorder.python("documented", cases.IMPORTABLE)


def resume(recorder: Recorder) -> None:
    """Record that a run stopped by SIGTERM half way ends where an uninterrupted one does."""
    recorder.train("plain", cases.SMALL)
    recorder.keep_run("plain")
    command = train_command("stopped", cases.SMALL | {"checkpoint.minutes": 1e-9})
    metrics = recorder.work / "runs/stopped/metrics.jsonl"
    with (recorder.work / "stopped.log").open("w") as log:
        training = subprocess.Popen(
            [sys.executable, "-m", "elias", *command], cwd=recorder.work, stdout=log, stderr=log
        )
        while training.poll() is None:
            if metrics.exists() and '"epoch"' in metrics.read_text(encoding="utf8"):
                training.send_signal(signal.SIGTERM)
                break
            time.sleep(0.002)
    recorder.values["exit code when stopped"] = training.wait(60)
    recorder.values["exit code when resumed"] = recorder.elias(*command)[0]
    other = Recorder(recorder.work.parent)
    other.keep_run("stopped")
    renamed = {key.replace("stopped|", "plain|", 1): v for key, v in other.tensors.items()}
    recorder.values["resumed differs in"] = list(tensor_differences(recorder.tensors, renamed, 0.0))


SECTIONS: dict[str, Callable[[Recorder], None]] = {
    **{"a": bag, "b": one_vs_all, "c": two_processes, "d": transformer, "e": onnx, "f": serve},
    **{"g": command_line, "h": formats, "i": report_and_experiment, "j": names_and_keys},
    "k": resume,
}


def record(folder: Path, inputs: Path | None, letters: list[str]) -> None:
    """Record the chosen sections below a folder, which must not hold a record of them yet."""
    if done := [letter for letter in letters if (folder / f"{letter}.json").exists()]:
        raise SystemExit(f"{folder} holds {', '.join(done)} already; choose another folder")
    (folder / "work").mkdir(parents=True, exist_ok=True)
    given = folder / "work/inputs"
    if not given.exists():
        cases.make_inputs(given) if inputs is None else shutil.copytree(inputs, given)
    for module in ("torch", "numba", "scipy.sparse", "pyarrow.parquet", "sklearn", "typer"):
        importlib.import_module(module)  # before the forks, so that each command starts at once
    sys.path[0] = ""
    from safetensors.torch import save_file

    for letter in letters:
        recorder, begun = Recorder(folder), time.monotonic()
        SECTIONS[letter](recorder)
        text = json.dumps(recorder.values, indent=1, ensure_ascii=False)
        (folder / f"{letter}.json").write_text(text + "\n", encoding="utf8")
        tensors = {key: value.contiguous() for key, value in recorder.tensors.items()}
        save_file(tensors, folder / f"{letter}.safetensors")
        say(f"{letter}: {len(recorder.values)} values, {len(tensors)} tensors, "
            f"{time.monotonic() - begun:.0f} s")  # fmt: skip


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inputs").add_argument("folder", type=Path)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--inputs", type=Path, help="the folder that `inputs` made")
    recording.add_argument("--only", default=",".join(SECTIONS), help="sections, e.g. a,b")
    comparing = commands.add_parser("compare")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--tolerance", type=float, default=0.0, help="for floats; 0: bits")
    comparing.add_argument("--ignore-layout", action="store_true", help="of files and tensors")
    given = parser.parse_args()
    if given.command == "compare":
        sys.exit(compare(given.a, given.b, given.tolerance, given.ignore_layout) > 0)
    folder = given.folder.resolve()
    if "FROZEN_RUN" not in os.environ:  # start again with settings that are read at start-up
        trees = os.environ.get("PYTHONPATH", str(ROOT / "src")).split(os.pathsep)
        tree = os.pathsep.join(str(Path(path).resolve()) for path in trees)
        cache = {"PYTHONPATH": tree, "XDG_CACHE_HOME": str(folder.parent / f"{folder.name}-cache")}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT | cache)
    if given.command == "inputs":
        cases.make_inputs(folder)
    else:
        inputs = given.inputs and given.inputs.resolve()
        record(folder, inputs, [letter.strip() for letter in given.only.split(",")])


if __name__ == "__main__":
    main()

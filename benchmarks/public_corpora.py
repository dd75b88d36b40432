"""Convert public corpora to JSON lines: a folder with ``train.jsonl`` and ``test.jsonl``.

    python3 benchmarks/public_corpora.py elife-keywords COPY OUT
    elias data info OUT
    python3 benchmarks/public_corpora.py --list

COPY is a copy of the repository that ``--list`` names: a checkout, or a git directory, whose newest
commit is read (files that it lists but does not hold are left out). ``docs/reference/corpora.md``
describes the corpora and the split. Nothing is downloaded, and no text belongs in this repository.

Points are split by groups: texts that are equal up to case, digits and punctuation (or what the
reader below gives as ``group``) are on one side. A published test split is kept; its groups are
removed from the training points. A text that occurs twice in a split becomes one point with the
labels of both.
"""

import argparse
import csv
import hashlib
import html
import io
import json
import re
import subprocess
import threading
import zipfile
from collections import Counter, defaultdict
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import yaml

from elias.data.atomic import staged_folder

TEST_SHARE = 0.2
ELIFE_SHARE = 0.1
ELIFE_MIN_WORDS = 400
FINNA_POINTS = 60_000
FINNA_LABELS = range(3, 21)
FINNA_MAX_WORDS = 40
BOE_WORDS = 200
REUTERS_TOPICS = 50
INDONESIAN = "id-multi-label-hate-speech-and-abusive-language-detection"
TWEET_CLASSES = ("hate speech", "offensive language", "neither")


class Point(NamedTuple):
    text: str
    labels: list[str]
    group: str = ""
    split: str = ""


def read_files(copy, pattern):
    """Yield path and content of the files that match, in the order of their paths."""
    if not (copy / "HEAD").is_file():
        paths = sorted(path for path in copy.rglob("*") if path.is_file())
        for path in paths:
            if fnmatch(path.relative_to(copy).as_posix(), pattern):
                yield path.relative_to(copy).as_posix(), path.read_bytes()
        return
    git = ["git", "--git-dir", str(copy)]
    listing = subprocess.run([*git, "ls-tree", "-rz", "HEAD"], capture_output=True, check=True)
    entries = [entry.split("\t") for entry in listing.stdout.decode().split("\0") if entry]
    entries = sorted((path, head.split()[2]) for head, path in entries if fnmatch(path, pattern))
    batch = subprocess.Popen(
        [*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def ask():
        with batch.stdin as stdin:
            stdin.writelines(f"{blob}\n".encode() for _, blob in entries)

    threading.Thread(target=ask, daemon=True).start()
    with batch:
        for path, _ in entries:
            header = batch.stdout.readline().split()
            if header[1] != b"missing":
                yield path, batch.stdout.read(int(header[2]) + 1)[:-1]


def read_rows(copy, name, encoding="utf8", **options):
    ((_, content),) = read_files(copy, name)
    yield from csv.DictReader(io.StringIO(content.decode(encoding), newline=""), **options)


def clean(text):
    return " ".join(html.unescape(text).replace("\0", " ").split())


def normalize(text):
    """Return the letters of the text, to find texts that differ in nothing else."""
    return re.sub(r"[\W\d_]+", " ", text.casefold()).strip()


def hash_share(*parts):
    """Return a number in [0, 1) that depends on nothing but the parts."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# Corpora with many labels -------------------------------------------------------------------------


def elife_articles(copy):
    """Yield the name and the XML of the newest version of each article."""
    files = read_files(copy, "articles/elife-*-v*.xml")
    for name, versions in groupby(files, lambda file: file[0].rsplit("-v", 1)[0]):
        numbers = {int(re.search(r"-v(\d+)\.xml", path)[1]): content for path, content in versions}
        yield name, numbers[max(numbers)]


def elife_keywords(copy):
    """Research and review articles; commentaries repeat keywords."""
    for _, content in elife_articles(copy):
        root = ElementTree.fromstring(content[: content.find(b"</front>")] + b"</front></article>")
        if root.get("article-type") not in ("research-article", "review-article"):
            continue
        title = root.find(".//article-meta//article-title")
        abstract = root.find(".//article-meta/abstract")
        paragraphs = abstract.iter("p") if abstract is not None else ()
        keywords = root.findall(".//kwd-group[@kwd-group-type='author-keywords']/kwd")
        if keywords:
            yield Point(
                clean(" ".join("".join(part.itertext()) for part in (title, *paragraphs))),
                ["".join(keyword.itertext()).casefold() for keyword in keywords],
                normalize("".join(title.itertext())),
            )


def elife_introductions(copy):
    """Sample long introductions of research articles, with subjects and research organisms."""
    for name, content in elife_articles(copy):
        if hash_share("sample", name) >= ELIFE_SHARE:
            continue
        root = ElementTree.fromstring(content)
        section = root.find("./body/sec[@sec-type='intro']")
        if root.get("article-type") != "research-article" or section is None:
            continue
        text = clean(" ".join("".join(part.itertext()) for part in section.iter("p")))
        meta = root.find("./front/article-meta")
        subjects = meta.findall(".//subj-group[@subj-group-type='heading']/subject")
        organisms = meta.findall("./kwd-group[@kwd-group-type='research-organism']/kwd")
        if len(text.split()) >= ELIFE_MIN_WORDS:
            yield Point(text, ["".join(label.itertext()) for label in (*subjects, *organisms)])


def finna_fi(copy):
    yield from finna_titles(copy, "fi")


def finna_en(copy):
    yield from finna_titles(copy, "en")


def finna_titles(copy, language):
    """Sample titles with 3 to 20 concepts; equal beginnings are one group (volumes, series).

    The source lists about 300 titles of each concept at most, found by a search that also matches
    parts of compound words: labels are incomplete and noisy. Abstracts among the titles are left
    out, and titles of many works ("Summary"), which have up to 16,122 concepts.
    """
    concepts = defaultdict(list)
    for _, content in read_files(copy, f"subjects/yso-finna-{language}/*.txt"):
        head, *titles = content.decode().splitlines()
        _, _, name = head.partition(" ")
        for title in dict.fromkeys(clean(title) for title in titles):
            if title not in (name, ""):
                concepts[title].append(name)
    groups = defaultdict(list)
    for title, names in concepts.items():
        if len(set(names)) in FINNA_LABELS and len(title.split()) <= FINNA_MAX_WORDS:
            groups[" ".join(normalize(title).split()[:4])].append(Point(title, names))
    n_points = 0
    for group in sorted(groups, key=lambda group: hash_share("sample", group)):
        if n_points >= FINNA_POINTS:
            break
        n_points += len(groups[group])
        yield from (point._replace(group=group) for point in groups[group])


def nuclei_tags(copy):
    for path, content in read_files(copy, "*.yaml"):
        try:
            template = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            print(f"{path}: left out, not valid YAML")
            continue
        info = template.get("info") if isinstance(template, dict) else None
        if info and info.get("tags"):
            text = f"{info.get('name', '')}. {info.get('description') or ''}"
            yield Point(clean(text), str(info["tags"]).split(","))


def boe_subjects(copy):
    """Spanish laws: title and the first 200 words; dates and numbers do not count for groups."""
    for _, content in read_files(copy, "es*/*.md"):
        _, head, body = content.decode().split("---\n", 2)
        facts = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if "subjects" in facts:
            title = json.loads(facts["title"])
            text = [title, *body.partition("\n\n")[2].split()[:BOE_WORDS]]
            yield Point(clean(" ".join(text)), json.loads(facts["subjects"]), normalize(title))


def tate_artists(copy):
    """Artworks and their subjects, by artist: no artist is in both splits.

    Turner, who made half of the artworks, is left out.
    """
    for _, content in read_files(copy, "artworks/*.json"):
        work = json.loads(content)
        artist = work.get("all_artists") or ""
        facts = [work.get(name) for name in ("title", "dateText", "medium", "groupTitle")]
        subjects = list(tate_leaves(work.get("subjects") or {}))
        if subjects and artist and "Turner" not in artist:
            text = ". ".join(str(fact) for fact in facts if fact and fact != "date not known")
            yield Point(clean(text), subjects, artist)


def tate_leaves(subject):
    children = subject.get("children") or ()
    if not children and "name" in subject:
        yield subject["name"]
    for child in children:
        yield from tate_leaves(child)


# Corpora with few labels --------------------------------------------------------------------------


def sms_spam(copy):
    for row in read_rows(
        copy, "data/sms.tsv", delimiter="\t", quoting=csv.QUOTE_NONE, fieldnames=("label", "text")
    ):
        yield Point(clean(row["text"]), [row["label"]])


def trec_questions(copy):
    ((_, content),) = read_files(copy, "packages/corpora/qc.zip")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for split in ("train", "test"):
            for line in archive.read(f"qc/{split}.txt").decode("latin-1").splitlines():
                label, _, question = line.partition(" ")
                yield Point(clean(question), [label], split=split)


def reuters_topics(copy):
    """The ModApté split, with the 50 topics that have most training points."""
    points = []
    for _, content in read_files(copy, "data/reut2-*.sgm"):
        for head, story in re.findall(
            r"<REUTERS (.*?)>(.*?)</REUTERS>", content.decode("latin-1"), re.DOTALL
        ):
            split = re.search(r'LEWISSPLIT="(TRAIN|TEST)"', head)
            topics = re.search(r"<TOPICS>(.*?)</TOPICS>", story)[1]
            if split and 'TOPICS="YES"' in head and topics:
                text = re.findall(r"<(?:TITLE|BODY)>(.*?)</(?:TITLE|BODY)>", story, re.DOTALL)
                labels = re.findall(r"<D>(.*?)</D>", topics)
                points.append(Point(clean(" ".join(text)), labels, split=split[1].lower()))
    counts = Counter(name for point in points if point.split == "train" for name in point.labels)
    frequent = {name for name, _ in counts.most_common(REUTERS_TOPICS)}
    for point in points:
        labels = [name for name in point.labels if name in frequent]
        if labels and point.text:
            yield point._replace(labels=labels)


def indonesian_hate_speech(copy):
    """Tweets with any of 12 labels; those with none are kept, without labels."""
    for row in read_rows(copy, "re_dataset.csv", "latin-1"):
        text = row.pop("Tweet")
        yield Point(clean(text), [name for name, value in row.items() if value == "1"])


def medical_abstracts(copy):
    """The file that the repository calls test; the other one may be too large for a copy."""
    rows = read_rows(copy, "medical_tc_labels.csv")
    names = {row["condition_label"]: row["condition_name"] for row in rows}
    for row in read_rows(copy, "medical_tc_test.csv"):
        yield Point(clean(row["medical_abstract"]), [names[row["condition_label"]]])


def offensive_tweets(copy):
    for row in read_rows(copy, "data/labeled_data.csv"):
        yield Point(clean(row["tweet"]), [TWEET_CLASSES[int(row["class"])]])


CORPORA = {
    elife_keywords: "elifesciences/elife-article-xml",
    elife_introductions: "elifesciences/elife-article-xml",
    finna_fi: "NatLibFi/Annif-corpora",
    finna_en: "NatLibFi/Annif-corpora",
    nuclei_tags: "projectdiscovery/nuclei-templates",
    boe_subjects: "legalize-dev/legalize-es",
    tate_artists: "tategallery/collection",
    sms_spam: "justmarkham/pycon-2016-tutorial",
    trec_questions: "nltk/nltk_data",
    reuters_topics: "wuodar/reuters_text_classification",
    indonesian_hate_speech: f"okkyibrohim/{INDONESIAN}",
    medical_abstracts: "sebischair/Medical-Abstracts-TC-Corpus",
    offensive_tweets: "t-davidson/hate-speech-and-offensive-language",
}
GROUP_COLUMN = {finna_en, tate_artists}
"""Corpora whose files have the group of each point, for ``elias train --group group``."""
READERS = {reader.__name__.replace("_", "-"): reader for reader in CORPORA}


def split_points(points):
    """Return group and labels of each text of both splits, in the order read."""
    points = [point._replace(group=point.group or normalize(point.text)) for point in points]
    tested = {point.group for point in points if point.split == "test"}
    splits = {"train": {}, "test": {}}
    for text, labels, group, split in points:
        if not split:
            split = "test" if hash_share("split", group) < TEST_SHARE else "train"
        if split == "test" or group not in tested:
            _, names = splits[split].setdefault(text, (group, {}))
            names.update(dict.fromkeys(name for label in labels if (name := clean(label))))
    return splits


def write_corpus(splits, out, with_groups):
    with staged_folder(out) as folder:
        for split, texts in splits.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf8") as file:
                for text, (group, labels) in texts.items():
                    line = {"text": text, "labels": list(labels)}
                    if with_groups:
                        line["group"] = group
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=READERS)
    parser.add_argument("copy", nargs="?", type=Path, help="checkout or git directory")
    parser.add_argument("out", nargs="?", type=Path, help="folder to write")
    parser.add_argument("--list", action="store_true", help="list names and repositories")
    arguments = parser.parse_args()
    if arguments.list:
        for name, reader in READERS.items():
            print(f"{name:24s} {CORPORA[reader]}")
        return
    if arguments.out is None:
        parser.error("give NAME COPY OUT, or --list")
    points = [point for point in READERS[arguments.name](arguments.copy) if point.text]
    if not points:
        parser.error(
            f"{arguments.copy} has no files of {arguments.name}: give a copy of its source"
        )
    with_groups = READERS[arguments.name] in GROUP_COLUMN
    write_corpus(split_points(points), arguments.out, with_groups)
    print(f"{arguments.out}: {len(points):,} records read")


if __name__ == "__main__":
    main()

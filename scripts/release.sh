#!/usr/bin/env bash
# Build what is published into dist/, and try it: `make release`. Nothing is uploaded.
#
#   scripts/release.sh PYTHON [--draft]
#
# PYTHON has the development tools. With --draft, changes under "Unreleased" are allowed.
# TORCH_INDEX=ADDRESS takes torch from another index, e.g. that of the wheels for CPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=$(realpath --no-symlinks "${1:?give the Python that has the development tools}")
unset PYTHONPATH

step() { printf '\n== %s\n' "$*" >&2; }

step "version, changelog, citation"
check=(--release)
if [ "${2:-}" = --draft ]; then check=(); fi
version=$("$python" scripts/check_version.py "${check[@]}")
echo "$version"

step "build"
rm -rf dist
# the wheel is built from the unpacked source archive, so the archive is complete
"$python" -m build --no-isolation --outdir dist . | tail -n 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "dist/elias_xmc-$version.tar.gz" -C "$work"
"$python" -m build --no-isolation --wheel --outdir dist "$work/elias_xmc-$version/runtime" | tail -n 1
ls -l dist

step "metadata"
tools=build/release-tools
if [ ! -x "$tools/bin/twine" ]; then
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check 'twine>=6'
fi
"$tools/bin/twine" check --strict dist/*

# Make an empty environment with one file of dist/ and what it declares.
install_file() { # NAME FILE
    step "install $2"
    "$python" -m venv "$work/$1"
    local pip=("$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
    if [ -n "${TORCH_INDEX:-}" ] && [ "$1" != runtime ]; then "${pip[@]}" -i "$TORCH_INDEX" torch; fi
    "${pip[@]}" "$root/dist/$2"
    mkdir "$work/$1/empty"
    cd "$work/$1/empty" # outside of the checkout, so that nothing is imported from it
    "$work/$1/bin/python" -c "import elias, sys
assert elias.__file__.startswith(sys.prefix), elias.__file__
assert elias.__version__ == '$version', elias.__version__"
}

# Generate a corpus, train and predict with the commands of an environment.
smoke_test() (
    export PATH=$1/bin:$PATH
    set -x
    elias data synthetic corpus --points 80 --labels 30
    elias train corpus --out run --device cpu --set encoder.dim=8 --set stages.stage1.epochs=1 --set stages.stage2.epochs=1
    echo "a text" | elias predict run -k 2
    elias info run --verify
)

install_file wheel "elias_xmc-$version-py3-none-any.whl"
smoke_test "$work/wheel"
step "users' code passes mypy --strict with the wheel"
cp "$root/examples/typed.py" .
"$python" -m mypy --strict --config-file= --python-executable "$work/wheel/bin/python" typed.py

install_file sdist "elias_xmc-$version.tar.gz"
smoke_test "$work/sdist"

install_file runtime "elias_xmc_runtime-$version-py3-none-any.whl"
"$work/runtime/bin/python" -c "
import importlib.util
from elias import OnnxModel
assert importlib.util.find_spec('torch') is None
print(OnnxModel('$root/tests/fixtures/model-0.1.onnx').predict('a text', top_k=2))"

step "elias-xmc $version is ready in dist/"

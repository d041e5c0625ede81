# Sourced by the other scripts: finds a Python, and makes a virtual environment with the package in it.

fail() {
    echo "error: $1" >&2
    exit 2
}

# "3.12" for a CPython that runs, nothing for what does not (pyenv puts commands on the PATH that only refuse).
python_version() {
    "$1" -c 'import sys; sys.implementation.name == "cpython" and print("{}.{}".format(*sys.version_info))' \
        2>/dev/null || true
}

# at_least 3.12 3.9: whether the first version is not older than the second.
at_least() {
    [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# newest_python 3.12 [3.12]: the newest Python of at least the first version and at most the second, on the PATH or of
# pyenv; nothing if there is none.
newest_python() {
    local candidate minor version best="" best_version="" candidates=(python3 python)
    for minor in 11 12 13 14; do candidates+=("python3.$minor"); done
    if command -v pyenv >/dev/null; then
        while read -r version; do
            candidates+=("$(pyenv prefix "$version" 2>/dev/null)/bin/python")
        done < <(pyenv versions --bare 2>/dev/null)
    fi
    for candidate in "${candidates[@]}"; do
        version=$(python_version "$candidate")
        at_least "$version" "$1" && at_least "${2:-99}" "$version" || continue
        if [ -z "$best" ] || ! at_least "$best_version" "$version"; then
            best=$candidate best_version=$version
        fi
    done
    echo "$best"
}

# usual_python FOLDER 3.11 [CANDIDATE ...]: a Python of at least that version: the environment's own, else the first
# candidate that suffices, else the newest.
usual_python() {
    local candidate folder=$1 needed=$2
    shift 2
    for candidate in "$folder/bin/python" "$@"; do
        if at_least "$(python_version "$candidate")" "$needed"; then
            command -v "$candidate"
            return
        fi
    done
    newest_python "$needed"
}

# make_venv PYTHON FOLDER EXTRAS: an environment with ".[EXTRAS]" installed; nothing happens if it is there already.
make_venv() {
    local python=$1 folder=$2 extras=$3 stamp="$2/installed-$3" version
    version=$(python_version "$python")
    if [ "$(python_version "$folder/bin/python")" != "$version" ]; then
        echo "making $folder with Python $version"
        "$python" -m venv --clear "$folder" ||
            fail "cannot make $folder with $python; install the venv module (Debian: apt install python3-venv)"
    fi
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "installing .[$extras] into $folder"
        "$folder/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --editable ".[$extras]" ||
            fail "cannot install .[$extras] into $folder; is the package index in reach?"
        touch "$stamp"
    fi
}

# Sourced by build_native and check_native: what a build outside of pip needs. pip itself brings these for its own builds only.

# ensure_build_tools ROOT PYTHON: PYTHON has the nanobind that pyproject.toml asks for, and cmake and ninja are on PATH, installed
# beside PYTHON where they are missing.
ensure_build_tools() {
    local root=$1 python=$2 missing=() tool
    if ! "$python" -c '' 2>/dev/null; then
        printf '%s\n' "No Python at $python: run scripts/quickstart first, or set PYTHON to one." >&2
        return 1
    fi
    PATH=$(dirname "$(command -v "$python")"):$PATH
    "$python" -c 'import nanobind' 2>/dev/null || missing+=("$(sed -n 's/^requires = .*"\(nanobind[^"]*\)".*/\1/p' "$root/pyproject.toml")")
    for tool in cmake ninja; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if [ ${#missing[@]} -eq 0 ]; then return; fi
    printf '%s\n' "Installing ${missing[*]} for $python" >&2
    "$python" -m pip install -q --disable-pip-version-check "${missing[@]}" && return
    printf '%s\n' "The native kernels need ${missing[*]} to be built: install them for $python." >&2
    return 1
}

"""Where LibTorch is, and which version it has."""

OLDEST = (2, 11)
NEWEST = (2, 15)
SUPPORTED = "2.11 to 2.15"

# A change of any of these makes the repositories that depend on LibTorch look again.
TORCH_ENVIRON = [
    "TORCH_HOME",
    "COMPOSABLE_VENV",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
]

_INSTALL = ("run tools/bootstrap, or `pip install torch==2.11.0` in the active venv, " +
            "or point TORCH_HOME at a LibTorch folder (one with include/ and lib/)")

def _in_prefix(repository_ctx, prefix):
    """The torch package inside a Python environment, or None."""
    lib = repository_ctx.path(prefix).get_child("lib")
    if not lib.exists:
        return None
    for python in lib.readdir():
        if python.basename.startswith("python3"):
            torch = python.get_child("site-packages").get_child("torch")
            if torch.get_child("include").exists:
                return torch
    return None

def _fail(message):
    fail("LibTorch: " + message)

def _version_text(repository_ctx, home):
    """The version a LibTorch folder says it has ("" if it does not say)."""
    python_version = home.get_child("version.py")  # a wheel
    if python_version.exists:
        for line in repository_ctx.read(python_version).split("\n"):
            if line.startswith("__version__"):
                return line.split("=", 1)[1].strip().strip("'\"")
    build_version = home.get_child("build-version")  # a LibTorch archive
    if build_version.exists:
        return repository_ctx.read(build_version).strip()
    return ""

def _check_version(text, home):
    numbers = text.split("+")[0].split(".")
    if len(numbers) < 2 or not numbers[0].isdigit() or not numbers[1].isdigit():
        _fail("no version found in %s (version.py or build-version); supported are %s: %s" %
              (home, SUPPORTED, _INSTALL))
    found = (int(numbers[0]), int(numbers[1]))
    if found < OLDEST or found > NEWEST:
        _fail("version %s at %s is not supported (supported: %s): %s" %
              (text, home, SUPPORTED, _INSTALL))

def locate_torch(repository_ctx):
    """Finds a supported LibTorch or fails in one line that says what to do.

    Looks at TORCH_HOME, then the project's venv (COMPOSABLE_VENV), then the
    active one (VIRTUAL_ENV, CONDA_PREFIX). The first that holds a LibTorch is
    taken; one of an unsupported version is an error, never skipped.

    Args:
      repository_ctx: the calling rule's; it must list TORCH_ENVIRON.

    Returns:
      struct(home = path of the folder with include/ and lib/, version = str).
    """
    env = repository_ctx.os.environ
    home = None
    if env.get("TORCH_HOME"):
        home = repository_ctx.path(env["TORCH_HOME"])
        if not home.get_child("include").exists and not _version_text(repository_ctx, home):
            _fail("TORCH_HOME=%s holds no LibTorch: %s" % (home, _INSTALL))
    else:
        tried = []
        for variable in ["COMPOSABLE_VENV", "VIRTUAL_ENV", "CONDA_PREFIX"]:
            if env.get(variable) and not home:
                tried.append("%s=%s" % (variable, env[variable]))
                home = _in_prefix(repository_ctx, env[variable])
        if not home:
            _fail("not found (looked at TORCH_HOME, COMPOSABLE_VENV, VIRTUAL_ENV, CONDA_PREFIX%s): %s" %
                  ("; set were " + ", ".join(tried) if tried else "; none is set", _INSTALL))
    version = _version_text(repository_ctx, home)
    _check_version(version, home)
    return struct(home = home, version = version)

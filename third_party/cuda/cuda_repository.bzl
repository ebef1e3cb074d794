"""@cuda: the CUDA toolkit's and NCCL's headers, and the runtime libraries LibTorch runs with.

Targets (empty where no toolkit is found):
  :cudart        CUDA headers, libcudart
  :nccl_headers  nccl.h
  :nccl          the same and libnccl
`@cuda//:cuda.bzl` has `if_cuda(yes, no = [])` and `requires_cuda()`.

A toolkit counts as found if LibTorch has CUDA, both are of the same major
version, and nccl.h is there. The libraries linked are those beside LibTorch
(its wheel's nvidia/ folder) where there are any, so that a process holds one of each.
"""

load("//third_party/libtorch:locate.bzl", "TORCH_ENVIRON", "locate_torch")

_INSTALL = "to build it, install the CUDA toolkit %s with NCCL and point CUDA_HOME at it"

_BZL = """\
CUDA_FOUND = {found}

def if_cuda(yes, no = []):
    \"\"\"`yes` where the CUDA toolkit is found and --config=cpu is not given, else `no`.\"\"\"
    if not CUDA_FOUND:
        return no
    return select({{
        "@cuda//:disabled": no,
        "//conditions:default": yes,
    }})

def requires_cuda():
    \"\"\"For target_compatible_with: the target is skipped where if_cuda() says no.\"\"\"
    return if_cuda([], ["@cuda//:unavailable"])
"""

_BUILD_COMMON = """\
package(default_visibility = ["//visibility:public"])

# {summary}
config_setting(
    name = "disabled",
    define_values = {{"composable_cuda": "off"}},
)

# No platform has this value.
constraint_setting(name = "cuda")

constraint_value(
    name = "unavailable",
    constraint_setting = ":cuda",
)
"""

_BUILD_FOUND = """
cc_library(
    name = "cudart",
    hdrs = glob(
        [
            "include/*.h",
            "include/*.hpp",
            "include/cooperative_groups/**",
            "include/crt/**",
            "include/nv/**",
        ],
        exclude = ["include/nccl*"],
        allow_empty = True,
    ) + glob(["include/cccl/nv/**"], allow_empty = True),
    includes = ["include"],
    linkopts = [
        "-Wl,--push-state,--no-as-needed",
        "{cudart}",
        "-Wl,-rpath,{cudart_folder}",
        "-Wl,--pop-state",
    ],
)

cc_library(
    name = "nccl_headers",
    hdrs = glob(["nccl/*.h", "nccl/nccl_device/**"], allow_empty = True),
    includes = ["nccl"],
)

cc_library(
    name = "nccl",
    linkopts = [
        "{nccl}",
        "-Wl,-rpath,{nccl_folder}",
    ],
    deps = [":nccl_headers"],
)
"""

_BUILD_MISSING = """
cc_library(name = "cudart")

cc_library(name = "nccl_headers")

cc_library(name = "nccl")
"""

def _first(repository_ctx, candidates):
    for candidate in candidates:
        path = repository_ctx.path(candidate)
        if path.exists:
            return path
    return None

def _torch_cuda_major(repository_ctx, torch):
    """The major version of LibTorch's CUDA, or "" if its folder does not say."""
    version = torch.home.get_child("version.py")
    if version.exists:
        for line in repository_ctx.read(version).split("\n"):
            if line.startswith("cuda") and "=" in line:
                return line.split("=", 1)[1].strip().strip("'\"").split(".")[0]
    return ""

def _toolkit_major(repository_ctx, home):
    header = home.get_child("include").get_child("cuda.h")
    for line in repository_ctx.read(header).split("\n"):
        words = line.split(" ")
        if len(words) == 3 and words[0] == "#define" and words[1] == "CUDA_VERSION":
            return str(int(words[2]) // 1000)
    return ""

def _is_toolkit(home):
    include = home.get_child("include")
    return include.get_child("cuda_runtime.h").exists and include.get_child("cuda.h").exists

def _locate_toolkit(repository_ctx):
    """The toolkit's folder (CUDA_HOME alone if set; nvcc's; the usual place), or None."""
    places = [repository_ctx.os.environ.get("CUDA_HOME")]
    if not places[0]:
        nvcc = repository_ctx.which("nvcc")
        places = [str(nvcc.realpath.dirname.dirname)] if nvcc else []
        places.append("/usr/local/cuda")
    for place in places:
        home = repository_ctx.path(place)
        if _is_toolkit(home):
            return home
    return None

def _missing(repository_ctx, why):
    repository_ctx.file("cuda.bzl", _BZL.format(found = False))
    repository_ctx.file("BUILD", _BUILD_COMMON.format(summary = "No CUDA: " + why) + _BUILD_MISSING)

def _missing_toolkit(repository_ctx, why, wanted):
    # Whoever has a LibTorch with CUDA may want to know what to do for the rest.
    # buildifier: disable=print
    print("CUDA code is not built, %s: %s" % (why, _INSTALL % wanted))
    _missing(repository_ctx, why)

def _cuda_repository(repository_ctx):
    torch = locate_torch(repository_ctx)
    if not torch.home.get_child("lib").get_child("libtorch_cuda.so").exists:
        _missing(repository_ctx, "LibTorch at %s is built without it" % torch.home)
        return
    wanted = _torch_cuda_major(repository_ctx, torch)
    home = _locate_toolkit(repository_ctx)
    if not home:
        _missing_toolkit(
            repository_ctx,
            "no toolkit at " + (repository_ctx.os.environ.get("CUDA_HOME") or
                                "CUDA_HOME (unset), nvcc's folder, /usr/local/cuda"),
            wanted,
        )
        return
    major = _toolkit_major(repository_ctx, home)
    if wanted and major != wanted:
        _missing_toolkit(
            repository_ctx,
            "the toolkit at %s is of CUDA %s and LibTorch %s of CUDA %s" %
            (home, major, torch.version, wanted),
            wanted,
        )
        return

    nvidia = "%s/nvidia" % torch.home.dirname
    cudart = _first(repository_ctx, [
        "%s/cu%s/lib/libcudart.so.%s" % (nvidia, major, major),
        "%s/cuda_runtime/lib/libcudart.so.%s" % (nvidia, major),
        "%s/lib64/libcudart.so" % home,
        "%s/lib/libcudart.so" % home,
    ])
    nccl = _first(repository_ctx, [
        "%s/nccl/lib/libnccl.so.2" % nvidia,
        "%s/lib64/libnccl.so.2" % home,
        "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
        "/usr/lib/aarch64-linux-gnu/libnccl.so.2",
    ])
    nccl_include = _first(repository_ctx, [
        p
        for p in ["%s/nccl/include" % nvidia, "%s/include" % home, "/usr/include"]
        if repository_ctx.path(p + "/nccl.h").exists
    ])
    if not cudart or not nccl or not nccl_include:
        _missing_toolkit(
            repository_ctx,
            "%s not found beside LibTorch nor in %s" % ("NCCL" if cudart else "libcudart", home),
            wanted,
        )
        return

    # Without the toolkit's nccl.h, which may be of another version and would be
    # found first.
    for entry in home.get_child("include").readdir():
        if not entry.basename.startswith("nccl"):
            repository_ctx.symlink(entry, "include/" + entry.basename)
    for name in ["nccl.h", "nccl_device.h", "nccl_device"]:
        if repository_ctx.path("%s/%s" % (nccl_include, name)).exists:
            repository_ctx.symlink("%s/%s" % (nccl_include, name), "nccl/" + name)
    repository_ctx.file("cuda.bzl", _BZL.format(found = True))
    repository_ctx.file("BUILD", (_BUILD_COMMON + _BUILD_FOUND).format(
        summary = "CUDA %s at %s" % (major, home),
        cudart = cudart,
        cudart_folder = cudart.dirname,
        nccl = nccl,
        nccl_folder = nccl.dirname,
    ))

cuda_repository = repository_rule(
    implementation = _cuda_repository,
    environ = TORCH_ENVIRON + ["CUDA_HOME", "PATH"],
    local = True,
    doc = "See the head of this file.",
)

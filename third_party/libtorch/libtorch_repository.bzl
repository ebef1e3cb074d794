"""@libtorch: the LibTorch of a PyTorch wheel or of a LibTorch archive.

Targets:
  :torch       headers, libtorch_cpu, libc10
  :torch_cuda  the same and libtorch_cuda, libc10_cuda (only if LibTorch has CUDA)

Libraries are linked where they lie, since they find each other relative to
their own folder; an rpath makes binaries run without LD_LIBRARY_PATH.
"""

load("//third_party/libtorch:locate.bzl", "TORCH_ENVIRON", "locate_torch")

_BUILD = """\
package(default_visibility = ["//visibility:public"])

# LibTorch {version} at {home}
cc_library(
    name = "torch",
    hdrs = glob(
        ["include/**/*.h", "include/**/*.hpp", "include/**/*.cuh"],
        exclude = ["include/pybind11/**", "include/oneapi/**"],
    ),
    includes = ["include", "include/torch/csrc/api/include"],
    linkopts = [
        "-L{home}/lib",
        "-Wl,-rpath,{home}/lib",
        "-Wl,--push-state,--no-as-needed",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,--pop-state",
    ],
)
"""

_BUILD_CUDA = """
cc_library(
    name = "torch_cuda",
    linkopts = [
        "-Wl,--push-state,--no-as-needed",
        "-L{home}/lib",
        "-ltorch_cuda",
        "-lc10_cuda",
        "-Wl,--pop-state",
    ],
    deps = [":torch", "@cuda//:cudart"],
)
"""

def _libtorch_repository(repository_ctx):
    torch = locate_torch(repository_ctx)
    repository_ctx.symlink(torch.home.get_child("include"), "include")
    build = _BUILD
    if torch.home.get_child("lib").get_child("libtorch_cuda.so").exists:
        build += _BUILD_CUDA
    repository_ctx.file("BUILD", build.format(home = torch.home, version = torch.version))

libtorch_repository = repository_rule(
    implementation = _libtorch_repository,
    environ = TORCH_ENVIRON,
    local = True,
    doc = "See the head of this file.",
)

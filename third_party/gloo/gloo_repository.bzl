"""@gloo//:headers: Gloo's headers, which ProcessGroupGloo.hpp needs and the wheel lacks.

Nothing is linked: LibTorch holds Gloo's code. Since the two may differ in age,
pass c10d's types only, and neither call nor derive from Gloo's.
"""

load("//third_party:system.bzl", "find_prefix")

_BUILD = """\
cc_library(
    name = "headers",
    hdrs = glob(["include/gloo/**/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _gloo_repository(repository_ctx):
    prefix = find_prefix(
        repository_ctx,
        library = "Gloo",
        header = "gloo/config.h",
        variable = "GLOO_HOME",
        install = "run tools/bootstrap or `apt-get install libgloo-dev`",
    )
    repository_ctx.symlink("%s/include/gloo" % prefix, "include/gloo")
    repository_ctx.file("BUILD", _BUILD)

gloo_repository = repository_rule(
    implementation = _gloo_repository,
    environ = ["GLOO_HOME"],
    local = True,
    doc = "See the head of this file.",
)

"""@com_google_googletest//:gtest and :gtest_main (both with GoogleMock), linked statically."""

load("//third_party:system.bzl", "find_libraries", "find_prefix")

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest",
    srcs = ["lib/libgmock.a", "lib/libgtest.a"],
    hdrs = glob(["include/**/*.h"]),
    # Every test has what .bazelrc's sanitizer settings name in its working folder.
    data = ["@composable//tools/suppressions"],
    includes = ["include"],
    linkopts = ["-lpthread"],
)

cc_library(
    name = "gtest_main",
    srcs = ["lib/libgmock_main.a"],
    deps = [":gtest"],
)
"""

_INSTALL = "run tools/bootstrap or `apt-get install libgtest-dev libgmock-dev`"

def _googletest_repository(repository_ctx):
    prefix = find_prefix(
        repository_ctx,
        library = "GoogleTest",
        header = "gmock/gmock.h",
        variable = "GOOGLETEST_HOME",
        install = _INSTALL,
    )
    names = ["libgmock.a", "libgtest.a", "libgmock_main.a"]
    libraries = find_libraries(repository_ctx, prefix, names)
    if len(libraries) != len(names):
        fail("GoogleTest: %s not all found below %s/lib: %s" % (", ".join(names), prefix, _INSTALL))
    for library in libraries:
        repository_ctx.symlink(library, "lib/" + library.basename)
    for folder in ["gtest", "gmock"]:
        repository_ctx.symlink("%s/include/%s" % (prefix, folder), "include/" + folder)
    repository_ctx.file("BUILD", _BUILD)

googletest_repository = repository_rule(
    implementation = _googletest_repository,
    environ = ["GOOGLETEST_HOME"],
    local = True,
    doc = "See the head of this file.",
)

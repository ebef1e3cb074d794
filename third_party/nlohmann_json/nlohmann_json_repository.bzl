"""@nlohmann_json//:json, header-only."""

load("//third_party:system.bzl", "find_prefix")

_BUILD = """\
cc_library(
    name = "json",
    hdrs = glob(["include/nlohmann/**/*.hpp"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _nlohmann_json_repository(repository_ctx):
    prefix = find_prefix(
        repository_ctx,
        library = "nlohmann-json",
        header = "nlohmann/json.hpp",
        variable = "NLOHMANN_JSON_HOME",
        install = "run tools/bootstrap or `apt-get install nlohmann-json3-dev`",
    )
    repository_ctx.symlink("%s/include/nlohmann" % prefix, "include/nlohmann")
    repository_ctx.file("BUILD", _BUILD)

nlohmann_json_repository = repository_rule(
    implementation = _nlohmann_json_repository,
    environ = ["NLOHMANN_JSON_HOME"],
    local = True,
    doc = "See the head of this file.",
)

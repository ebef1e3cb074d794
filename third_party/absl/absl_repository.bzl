"""@com_google_absl: the system's Abseil under the labels that upstream's Bazel build uses.

Every label gives all headers and all libraries, of which the linker keeps the
ones that are used; that a dependency is spelled is not checked here.
"""

load("//third_party:system.bzl", "find_prefix")

# package: targets, as upstream has them.
_LABELS = {
    "algorithm": ["algorithm", "container"],
    "base": ["base", "config", "core_headers", "endian", "log_severity", "no_destructor", "nullability"],
    "cleanup": ["cleanup"],
    "container": [
        "btree",
        "fixed_array",
        "flat_hash_map",
        "flat_hash_set",
        "inlined_vector",
        "node_hash_map",
        "node_hash_set",
    ],
    "debugging": ["failure_signal_handler", "leak_check", "stacktrace", "symbolize"],
    "flags": ["commandlineflag", "config", "flag", "marshalling", "parse", "reflection", "usage"],
    "functional": ["any_invocable", "bind_front", "function_ref"],
    "hash": ["hash"],
    "memory": ["memory"],
    "meta": ["type_traits"],
    "numeric": ["bits", "int128"],
    "random": ["bit_gen_ref", "distributions", "random"],
    "status": ["status", "statusor"],
    "strings": ["cord", "str_format", "string_view", "strings"],
    "synchronization": ["synchronization"],
    "time": ["time"],
    "types": ["any", "bad_any_cast", "optional", "span", "variant"],
    "utility": ["utility"],
}

_BUILD = """\
config_setting(
    name = "tsan",
    define_values = {{"composable_tsan": "on"}},
)

cc_library(
    name = "headers",
    hdrs = glob(["include/absl/**/*.h", "include/absl/**/*.inc"]),
    includes = ["include"],
    visibility = ["@composable//third_party/absl:__pkg__"],
)

cc_library(
    name = "system",
    linkopts = [
        "-L{folder}",
{rpath}        "-Wl,--push-state,--as-needed",
{libraries}
        "-Wl,--pop-state",
    ],
    visibility = ["//:__subpackages__"],
    deps = [":headers"] + select({{
        ":tsan": ["@composable//third_party/absl:tsan_mutex"],
        "//conditions:default": [],
    }}),
)
"""

_ALIAS = """\
alias(
    name = "{name}",
    actual = "//:system",
    visibility = ["//visibility:public"],
)
"""

_INSTALL = "run tools/bootstrap or `apt-get install libabsl-dev`"

def _shared_libraries(prefix):
    """(folder, names) of Abseil's shared libraries below a prefix."""
    folders = [prefix.get_child("lib")]
    if folders[0].exists:
        folders = [d for d in folders[0].readdir() if d.basename.endswith("-linux-gnu")] + folders
    for folder in folders + [prefix.get_child("lib64")]:
        if folder.exists and folder.get_child("libabsl_base.so").exists:
            return folder, [
                f.basename[len("lib"):-len(".so")]
                for f in folder.readdir()
                if f.basename.startswith("libabsl_") and f.basename.endswith(".so")
            ]
    fail("Abseil: libabsl_base.so not found below %s/lib: %s" % (prefix, _INSTALL))

def _absl_repository(repository_ctx):
    prefix = find_prefix(
        repository_ctx,
        library = "Abseil",
        header = "absl/base/config.h",
        variable = "ABSL_HOME",
        install = _INSTALL,
    )
    folder, names = _shared_libraries(prefix)
    repository_ctx.symlink("%s/include/absl" % prefix, "include/absl")
    repository_ctx.file("BUILD", _BUILD.format(
        folder = folder,
        # The loader finds those of the system by itself.
        rpath = "" if str(prefix) == "/usr" else "        \"-Wl,-rpath,%s\",\n" % folder,
        libraries = "\n".join(["        \"-l%s\"," % n for n in sorted(names)]),
    ))
    for package, targets in _LABELS.items():
        repository_ctx.file(
            "absl/%s/BUILD" % package,
            "\n".join([_ALIAS.format(name = t) for t in targets]),
        )

absl_repository = repository_rule(
    implementation = _absl_repository,
    environ = ["ABSL_HOME"],
    local = True,
    doc = "See the head of this file.",
)

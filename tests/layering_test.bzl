"""sources_below(): the workspace's own source files that some targets are built from."""

_SourcesInfo = provider(fields = ["files"])

def _collect_impl(_target, ctx):
    own = []
    for attribute in ["srcs", "hdrs", "textual_hdrs"]:
        own += getattr(ctx.rule.files, attribute, [])
    return [_SourcesInfo(files = depset(
        [f for f in own if f.is_source and not f.path.startswith("external/")],
        transitive = [
            dep[_SourcesInfo].files
            for dep in getattr(ctx.rule.attr, "deps", [])
            if _SourcesInfo in dep
        ],
    ))]

_collect = aspect(attr_aspects = ["deps"], implementation = _collect_impl)

def _sources_below_impl(ctx):
    files = depset(transitive = [dep[_SourcesInfo].files for dep in ctx.attr.deps])
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files))]

sources_below = rule(
    attrs = {"deps": attr.label_list(aspects = [_collect])},
    implementation = _sources_below_impl,
)

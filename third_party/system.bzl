"""Libraries that the system's packages provide."""

# Where packages put headers, searched in this order after the caller's own.
_PREFIXES = ["/usr", "/usr/local", "/opt/homebrew"]

def find_prefix(repository_ctx, library, header, variable, install):
    """The prefix under which include/<header> lies, or fails in one line.

    Args:
      repository_ctx: the calling rule's; it must list `variable` in environ.
      library: the name to use in the message.
      header: a header below include/.
      variable: the environment variable that names a prefix to use instead.
      install: what to do if there is none.

    Returns:
      The path of the prefix.
    """
    own = repository_ctx.os.environ.get(variable)
    for prefix in [own] if own else _PREFIXES:
        path = repository_ctx.path(prefix)
        if repository_ctx.path("%s/include/%s" % (path, header)).exists:
            return path
    fail("%s: %s not found below %s: %s, or point %s at the folder that has include/" % (
        library,
        header,
        own + "/include" if own else ", ".join([p + "/include" for p in _PREFIXES]),
        install,
        variable,
    ))

def find_libraries(repository_ctx, prefix, names):
    """The paths of library files below a prefix, in the order of `names`; those that exist."""
    found = []
    folders = [prefix.get_child("lib")]
    if folders[0].exists:
        folders += [d for d in folders[0].readdir() if d.basename.endswith("-linux-gnu")]
    folders.append(prefix.get_child("lib64"))
    for name in names:
        for folder in folders:
            if folder.get_child(name).exists:
                found.append(folder.get_child(name))
                break
    return found

"""What tools/presubmit knows about compilations: which files a source is made of, with
which command it is checked, and whether that check has passed before.
"""

import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
ROOMS = ("collectives", "state", "hooks", "composable")


class Tree:
    """The sources below `root`, and the entries of its compile_commands.json."""

    def __init__(self, root, commands):
        self.root = pathlib.Path(root)
        self.commands = {entry["file"]: entry["arguments"] for entry in commands}
        self._includes = {}

    @classmethod
    def load(cls, root):
        text = (pathlib.Path(root) / "compile_commands.json").read_text(encoding="utf-8")
        return cls(root, json.loads(text))

    def includes(self, name):
        """The tree's own files that `name` includes by quotes."""
        if name not in self._includes:
            path = self.root / name
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            self._includes[name] = [i for i in INCLUDE.findall(text)
                                    if (self.root / i).is_file()]
        return self._includes[name]

    def closure(self, name):
        """`name` and all of the tree's files that it includes, sorted."""
        seen = set()
        todo = [name]
        while todo:
            current = todo.pop()
            if current not in seen:
                seen.add(current)
                todo += self.includes(current)
        return sorted(seen)

    def source_for(self, name):
        """The compiled file whose compilation shows what is in `name`, or None.

        For a header its own .cc, else the one with the fewest files among those that
        include it.
        """
        if name in self.commands:
            return name
        own = os.path.splitext(name)[0] + ".cc"
        if own in self.commands and name in self.includes(own):
            return own
        for files_of in (lambda s: self.includes(s), self.closure):
            users = [s for s in self.commands if name in files_of(s)]
            if users:
                return min(users, key=lambda s: (len(self.closure(s)), s))
        return None

    def public_headers(self, names):
        return [n for n in names if n.endswith(".h") and n.split("/")[0] in ROOMS]

    def header_command(self, header):
        """Compiles `header` alone, with its own .cc's flags or its room's usual ones."""
        own = os.path.splitext(header)[0] + ".cc"
        if own in self.commands:
            flags = self._flags(own)
        else:
            room = header.split("/")[0]
            counts = collections.Counter(
                self._flags(s) for s in sorted(self.commands) if s.split("/")[0] == room)
            if not counts:
                raise LookupError(f"no compiled file in {room}/, whose flags {header} needs")
            flags = counts.most_common(1)[0][0]
        return [*flags, "-Werror", "-fsyntax-only", "-x", "c++", "-include", header,
                "/dev/null"]

    def _flags(self, source):
        arguments = self.commands[source]
        at = arguments.index("-c")
        return tuple(arguments[:at] + arguments[at + 2:])

    def key(self, kind, name, command, extra=()):
        """Names the check `kind` of `name`: equal keys have equal results, in any clone."""
        digest = hashlib.sha256()
        # Bazel's folders differ from clone to clone; what they link to counts.
        words = [kind] + [re.sub(r"\S*/(external|bazel-out)/", r"\1/", word)
                          for word in command]
        libtorch = next((word for word in command if word.endswith("/libtorch/include")), "")
        words.append(os.path.realpath(libtorch) if libtorch else "")
        for word in words:
            digest.update(word.encode() + b"\0")
        for file in [*self.closure(name), *extra]:
            digest.update(file.encode() + b"\0" + (self.root / file).read_bytes() + b"\0")
        return digest.hexdigest()


class Passed:
    """The keys of checks that have passed, kept in a folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def __contains__(self, key):
        return (self.folder / key[:40]).exists()

    def add(self, key):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / key[:40]).touch()


def run_checks(jobs, passed, root, parallel=2):
    """Runs what has not passed before.

    `jobs` are triples of a name, a key and a command; a command fails by its exit status.
    Returns how many were run, and what those that failed said.
    """
    todo = [job for job in jobs if job[1] not in passed]

    def run(job):
        name, key, command = job
        done = subprocess.run(command, cwd=root, check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode == 0:
            passed.add(key)
            return None
        return f"{name}:\n{done.stdout}"

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        return len(todo), [output for output in pool.map(run, todo) if output]

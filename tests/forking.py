"""Runs scripts, each in a process of its own whose imports have been made before: a fork of this program.

`python forking.py MODULE…` imports the modules. Each line of its stdin is a JSON list: a script, its folder, and
the file for its output. The line that answers it is the script's exit code.
"""

import gc
import importlib
import json
import os
import sys
import types


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # else the end of each fork touches all objects, and so copies them: 0.15 s
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*json.loads(line))
            return  # and the interpreter ends, as after any script
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(script: str, folder: str, output: str) -> None:
    """Run `script` as `python script` does: as the module `__main__`, in which nothing else is."""
    for stream, path in enumerate([os.devnull, output, output]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    os.chdir(folder)
    sys.argv, sys.path[0] = [script], os.path.dirname(script)  # noqa: PTH120
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = script
    with open(script, encoding="utf-8") as file:  # noqa: PTH123
        code = compile(file.read(), script, "exec")
    exec(code, vars(module))  # noqa: S102


if __name__ == "__main__":
    main()

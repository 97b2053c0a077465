"""New Pythons for tests without the seconds of importing: forked from one process that has imported everything.

`session.py` puts a stand-in where tests and the package look for the interpreter, `sys.executable`. The stand-in runs
`client.py`, which hands command, folder, variables and standard streams to `server.py`. That process forks, and
`child.py` makes the fork look like a Python that has just started. Signals and exit statuses pass through the client.

A command runs in a real interpreter where a fork would differ: options and variables that count while Python or a
package starts, a `sitecustomize`, a module that hides one that is imported already. Tests of the start
itself are marked `real_python`.
"""

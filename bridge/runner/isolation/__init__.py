"""The wall around a job: what its child gets, and what keeps it from everything else.

`room` is what it gets, `hidden` what it must not reach. On Linux `namespaces` and `view` build a machine of
its own around it, `landlock` and `seccomp` are second layers and take over where namespaces are not
permitted. On macOS `seatbelt` writes a sandbox profile. `watchdog` measures it against its limits,
`enforced` says what of all this holds on a machine.
"""

"""Keeps a job to what it is given: `base` lists it, `linux` and `macos` enforce it, `watchdog` measures.

The sandbox is an allow list: what `base.Access` does not name does not exist for the job.
"""

"""GitHub Actions as the second way to carry requests, and the REST API, which is optional.

api.py is the only module that sends HTTP; dispatch.py starts, finds and watches the run of a request. A run
has two jobs: execute.py on the Mac, publish.py on a hosted machine; workflow.py is what they share.
"""

"""GitHub: its REST API, and GitHub Actions as the second way to carry requests.

    repository.py     which repository a remote's address means; tokens
    api.py            the REST API, the only module that sends HTTP
    dispatch.py       start, find, watch and re-run the workflow run of a request
    workflow.py       a workflow run as its jobs see it: its request, the remote, its outputs and its log
    execute.py        the job on the Mac: run the request, write the signed result
    artifact.py       the folder that passes between the jobs, and its digest
    publish.py        the job on a hosted runner: compare, re-judge, commit

The API is optional: over GitHub Actions, too, requests and results travel by git.
"""

"""The workflow's side of a request over GitHub Actions: `execute` on the Mac, `publish` with a token.

GitHub's fleet is the scheduler, so there is no claim on the bus. What passes between the two jobs is a folder
(`parcel`) whose digest travels beside it.
"""

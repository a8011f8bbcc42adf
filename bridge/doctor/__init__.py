"""What is missing here? For the three roles a machine can have: a client, a runner, a workflow's job."""

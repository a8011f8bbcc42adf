"""Real git servers on 127.0.0.1 for one bare repository, and a proxy in front of them that can fail.

Each server owns its configuration, keys and logs in a folder that the test names.
`scripts/install_test_servers.sh` installs what they need; without it they fail and say so.
"""

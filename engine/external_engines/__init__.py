"""Other people's decoding loops on our targets, with our caches in them: KV channels for foreign engines.

An engine of this package owns its loop and makes its own caches. `strategies` are the ways in which it can be
made to take ours, `counting` is how it is known that it did, `belongings` keeps what it leaves on a target
away from everybody else, and `guest` puts these together.
"""

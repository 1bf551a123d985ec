"""A relay brings weight versions over a slow link once, to the engines on its side of the link.

The command is `rose relay`. `server` answers the readers, `cache` keeps what crossed the link.
Readers (`rose.transfer.relay_client`) belong to the core, which knows a relay by its URL alone.
"""

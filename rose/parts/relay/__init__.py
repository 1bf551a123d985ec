"""A relay brings weight versions over a slow link once, to the engines on its side of the link.

The command is `rose relay`. `server` answers the readers, `cache` keeps what crossed the link.
`relay_client` is the reader, through which engines get versions (transfer.relay).
"""

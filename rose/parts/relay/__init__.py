"""A relay brings weight versions over a slow link once, to the engines on its side of the link.

The command is `rose relay`. `server` answers the readers, and `cache` keeps their files' bytes.
`relay_client` is the reader, through which engines get versions (transfer.relay).
"""

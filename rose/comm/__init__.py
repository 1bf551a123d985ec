"""Communication between ranks by MPI: message encoding, mailboxes, joining, rendezvous addresses.

May import `rose.protocol`, but does not depend on what the messages mean.
"""

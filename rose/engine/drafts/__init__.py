"""Drafts of a turn's next tokens, from its own text and from what the siblings of its group have
said (Seer's grouped speculative decoding, arXiv 2511.14617), through vLLM's `custom_class`.

`text` holds a group's texts and finds drafts in them, `gain` decides how long drafts are,
`proposer` is what vLLM calls, `rejection` mends vLLM's sampling of drafted positions on CPUs.
Importing this package imports nothing else.
"""

PROPOSER = "rose.engine.drafts.proposer.GroupProposer"  # vLLM's speculative_config.model
EXTENSION = "rose.engine.worker_extension.WorkerExtension"  # which mends the sampling of drafts

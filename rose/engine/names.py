"""Names that engines, schedulers and commands agree on."""

FOLDER = "ROSE_COSERVING"  # environment: the folder of a device's boards
CONFIG = "config.json"  # in it: what `device.Device` reads
# environment: a file to which an engine appends its steps, one JSON object a line
STEPS = "ROSE_COSERVING_STEPS"
# vLLM's stop_reason of a request that was handed back for want of memory or time
EVICTED = "rose-evicted"

"""Views of a run, drawn from the files that its ranks wrote.

`views` writes `report.html` (`report`) and `trace.json.gz` (`trace`) when an attempt has ended. The
command `rose show` (`show`) prints trajectories. `shell` and page/ also draw the pages of other
parts.
"""

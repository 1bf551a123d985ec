"""Trackers: Weights & Biases and MLflow get the numbers of metrics.jsonl too, while a run trains.

`trackers` has a class for each and the queue between it and the run. A run without
observe.wandb.project and observe.mlflow.uri needs none of it; TensorBoard belongs to the core.
"""

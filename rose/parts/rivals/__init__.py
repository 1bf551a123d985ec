"""The policies of rival systems: Libra, Seer, ThunderAgent, RLBoost, RollArt, RollPacker, Prism,
and serverless and elastic provisioning. They run live and in the simulator, chosen by scheduler/*.
A run with ROSE's own policies, or those of veRL and AReaL, needs none of them.

Like the policies of `rose.policies`, they are pure. They may import only that package and
`rose.scheduler`.
"""

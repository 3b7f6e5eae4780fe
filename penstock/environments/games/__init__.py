"""Games: environments in which several agents, all played by the policy, take turns."""

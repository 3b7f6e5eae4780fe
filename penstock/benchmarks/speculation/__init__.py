"""What drafted tokens would bring a rollout's last responses: `penstock bench speculation`."""

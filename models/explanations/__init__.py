"""Explanation maps, computed from captures or from perturbed inputs."""

"""The results of forwards, collected as features."""

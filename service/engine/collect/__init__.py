"""What forwards gave, as features."""

"""The ELIAS model: encoders, label graph, search and losses (§3)."""

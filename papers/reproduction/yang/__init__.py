"""Yang et al.: Table I and Fig. 3 to 6."""

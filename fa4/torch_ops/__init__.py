"""From a checked call to the launch: torch operators, gradients, kinds of calls that are known, execution of a plan."""

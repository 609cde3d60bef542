"""The Blackwell backward of head dims above 128: one kernel for each of dV, dK and dQ."""

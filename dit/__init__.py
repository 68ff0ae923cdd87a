"""DiT training that is planned before it starts and measured against its plan."""

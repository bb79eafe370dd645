"""Steps, phases, actions and scalars of one rank."""

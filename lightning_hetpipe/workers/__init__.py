"""Virtual workers among each other: waves, collectives, group membership and the join handshake."""

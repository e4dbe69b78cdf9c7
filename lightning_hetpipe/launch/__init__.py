"""Starting the processes of a launch: virtual workers, servers, ranks, and their ends."""

"""Commands and methods that help to move a script. They read the core, and the core never imports them."""

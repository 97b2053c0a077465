"""Random native modules beside Lightning's and the Trainer."""

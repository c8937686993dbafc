"""What an elastic training does about its nodes: power caps steered and learnt, bottlenecks found, heirs ordered."""

"""The operator's workflow: a project directory, its ledger, and the evidence of each deletion."""

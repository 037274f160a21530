"""The paper's four modules, under the paper's names, one file each."""

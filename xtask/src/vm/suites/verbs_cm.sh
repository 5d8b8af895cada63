over_rxe verbs on "$@"
over_rxe verbs-no-imm on "$@"

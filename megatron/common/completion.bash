# Completion of verbs and flags for bash, and for zsh after `autoload bashcompinit && bashcompinit`:
#
#   eval "$(megatron completion)"

_megatron() {
    local typed=${COMP_WORDS[COMP_CWORD]} program=("${COMP_WORDS[0]}")
    COMPREPLY=()
    if [[ ${program##*/} == megatron ]]; then
        if ((COMP_CWORD == 1)); then
            COMPREPLY=($(compgen -W "$("${program[@]}" --help | sed -n 's/^  \([a-z0-9-]*\) .*/\1/p')" -- "$typed"))
            return
        fi
        program+=("${COMP_WORDS[1]}")
    fi
    if [[ $typed == -* ]]; then
        COMPREPLY=($(compgen -W "$("${program[@]}" --help-all | grep -oE '^ +--[A-Za-z0-9_-]+' | sort -u)" -- "$typed"))
    fi
}

complete -o default -F _megatron megatron megatron-{train,finetune-sft,preprocess,merge,inspect-data} \
    megatron-{generate,serve,evaluate,plan,doctor,watch,from-hf,to-hf}

# Arguments: URL of the server, name or folder of the tokenizer, name of the report, number of requests.
guidellm run --backend kind=openai_http,target="$1" --tokenizer kind=huggingface_auto,model="$2" \
  --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --profile kind=synchronous --constraint kind=max_requests,count="$4" \
  --disable-progress --output kind=json,path="$3"

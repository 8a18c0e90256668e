# The profile `sweep`: one request at a time, then all at once, then at the rate that this has shown.
# Arguments: URL of the server, name or folder of the tokenizer, name of the report.
guidellm run --backend kind=openai_http,target="$1" --tokenizer kind=huggingface_auto,model="$2" \
  --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --profile kind=sweep,sweep_size=3 --constraint kind=max_requests,count=6 \
  --disable-progress --output kind=json,path="$3"
